"""This package has inline PTX: instructions and the device functions made of them."""
