"""Several processes, one per GPU: who they are, how they meet, what they exchange."""
