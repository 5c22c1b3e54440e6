"""This module finds out which rank this process is, from the variables that torchrun, SLURM and Open MPI put into the environment.

Without any of their variables a process is alone. The names in the order in which they are looked for:

    torchrun, nbcnn launch   RANK  WORLD_SIZE  LOCAL_RANK  MASTER_ADDR  MASTER_PORT
    Open MPI                 OMPI_COMM_WORLD_RANK  …_SIZE  …_LOCAL_RANK  …_LOCAL_SIZE
    SLURM (srun)             SLURM_PROCID  SLURM_STEP_NUM_TASKS  SLURM_LOCALID  SLURM_STEP_NODELIST (else SLURM_NODELIST)  SLURM_JOB_ID

MASTER_ADDR is the machine of rank 0; SLURM's list of nodes begins with it. The ranks meet at NBCNN_PORT there, by default MASTER_PORT + 1,
because torchrun's own store may hold MASTER_PORT. NBCNN_TOKEN, or the file that NBCNN_TOKEN_FILE names, holds the secret of the job, by which
its ranks know each other: `nbcnn launch` makes one on a single machine, and in every other case it is given to all ranks. Without it nobody
listens or calls.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nbcnn.files import regular
from nbcnn.files.numerals import real_in, whole_in
from nbcnn.files.quote import brief, counted, quoted

MASTER_PORT = 29500
"""The default of MASTER_PORT, which is torchrun's."""
MOST_RANKS = 1 << 16
"""Ranks of a job at most: their numbers go over the wire in 32 bits."""
TIMEOUTS = (1, 30 * 86_400)
"""Seconds that ranks may be told to wait for each other, from a second to 30 days."""
_PORTS, _LONGEST_ADDRESS = 65_535, 253
LEAST_TOKEN, LONGEST_TOKEN = 16, 4096
"""Fewest characters of a token: shorter ones could be guessed."""
NO_TOKEN = """NBCNN_TOKEN is not set: ranks let nobody in without a secret that all of them know
  on one machine:      python -m nbcnn launch --nproc N COMMAND … makes one by itself
  else, once:          (umask 077; python -c "import secrets; print(secrets.token_hex(32))" > nbcnn-token), and copy that file to every machine
  then, on each:       export NBCNN_TOKEN_FILE=$PWD/nbcnn-token (mpirun passes it on with -x NBCNN_TOKEN_FILE)"""  # noqa: S105, a message


class LaunchError(ValueError):
    """The environment does not say which rank this is, or not the token; the message names the variable."""

    exit_code = 2


@dataclass(frozen=True)
class Rank:
    """Process `rank` of `size`, the `local`-th of its machine; rank 0 listens at `address`, `port`.

    `token` is a secret that only the ranks of one job know; `timeout` seconds is how long a rank waits for others.
    """

    rank: int
    size: int
    local: int
    address: str
    port: int
    token: str = field(default="", repr=False)
    timeout: float = 600.0


def from_environment(variables: Mapping[str, str]) -> Rank | None:
    """The rank that `variables` describe; None for a process of its own.

    Raises LaunchError for a variable that is missing beside others of its kind, or that makes no sense.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        rank, size, local = (_count(variables, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        address, base = variables.get("MASTER_ADDR", ""), MASTER_PORT
    elif "OMPI_COMM_WORLD_RANK" in variables:
        rank, size, local, here = (_count(variables, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        address, base = variables.get("MASTER_ADDR", "127.0.0.1" if here == size else ""), MASTER_PORT
    elif "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables:
        rank, size, local = (_count(variables, f"SLURM_{name}") for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
        address = variables.get("MASTER_ADDR", first_node(nodes))
        # Two jobs that share a node must not meet at one port.
        base = MASTER_PORT + _count(variables, "SLURM_JOB_ID", 0, 1 << 40) % 10_000 * 2 if "SLURM_JOB_ID" in variables else MASTER_PORT
    else:
        return None
    if size == 1 and rank == 0:
        return None
    if not rank < size:
        raise LaunchError(f"rank {rank} of {size}: ranks count from 0, so the last is {size - 1}")
    if not address:
        raise LaunchError("MASTER_ADDR is not set: it must name the machine of rank 0 (mpirun -x MASTER_ADDR=… passes it on)")
    given = "NBCNN_PORT" in variables
    port = _count(variables, "NBCNN_PORT", 0, _PORTS) if given else _count({"MASTER_PORT": str(base), **variables}, "MASTER_PORT", 0, _PORTS) + 1
    if not 0 < port <= _PORTS:
        raise LaunchError(f"port {port} is none: set NBCNN_PORT to a free one between 1024 and 65535, the same for all ranks")
    try:
        timeout = real_in(variables, "NBCNN_TIMEOUT", *TIMEOUTS) if "NBCNN_TIMEOUT" in variables else Rank.timeout
    except ValueError as error:
        raise LaunchError(f"{error} (seconds)") from None
    return Rank(rank, size, local, _checked(address), port, token(variables), timeout)


def token(variables: Mapping[str, str]) -> str:
    """NBCNN_TOKEN, or what NBCNN_TOKEN_FILE holds. Raises LaunchError without either, or if others know it or could guess it."""
    found, source = variables.get("NBCNN_TOKEN", ""), "NBCNN_TOKEN"
    if not found and variables.get("NBCNN_TOKEN_FILE"):
        path = Path(variables["NBCNN_TOKEN_FILE"])
        source = f"the token in {path} (NBCNN_TOKEN_FILE)"
        try:
            with regular.opened(path) as file:
                mode = os.fstat(file.fileno()).st_mode
                found = file.read(LONGEST_TOKEN + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"{source} cannot be read ({brief(error)})") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LaunchError(f"{source} is open to other users: chmod 600 {path}, or better make another")
    elif not found:
        raise LaunchError(NO_TOKEN)
    if not LEAST_TOKEN <= len(found) <= LONGEST_TOKEN:
        raise LaunchError(f"{source} has {counted(len(found), 'character')}: {LEAST_TOKEN} to {LONGEST_TOKEN:,} that nobody guesses are needed")
    return found


def _count(variables: Mapping[str, str], name: str, least: int = 0, most: int = MOST_RANKS) -> int:
    if name not in variables:
        raise LaunchError(f"{name} is not set, though the launcher's other variables are")
    try:
        return whole_in(variables, name, least, most)
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _checked(address: str) -> str:
    """An address, if it can be one of a machine: of 253 characters at most, 63 between two dots. Raises LaunchError."""
    try:
        fits = len(address) <= _LONGEST_ADDRESS and address.isprintable() and " " not in address and bool(address.encode("idna"))
    except UnicodeError:
        fits = False
    if not fits:
        raise LaunchError(f"MASTER_ADDR is {quoted(address)}, which is no name or address of a machine")
    return address


def first_node(nodes: str) -> str:
    """The first host of SLURM's compact list: "gpu[03-05,9],login" → "gpu03", "rack[1-2]node[0-7]" → "rack1node0"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def visible_device(rank: Rank, variables: Mapping[str, str]) -> str:
    """What CUDA_VISIBLE_DEVICES must be for this rank: one GPU, the `local`-th of those that it may use.

    A launcher that shows each rank a single GPU has chosen already. Raises LaunchError for more ranks than GPUs.
    """
    shown = variables.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return str(rank.local)
    devices = [device.strip() for device in shown.split(",") if device.strip()]
    if len(devices) <= 1:
        return shown
    if rank.local >= len(devices):
        raise LaunchError(f"rank {rank.rank} is number {rank.local} on its machine, which shows {len(devices)} GPUs (CUDA_VISIBLE_DEVICES={shown})")
    return devices[rank.local]
