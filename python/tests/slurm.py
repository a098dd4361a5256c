"""A Slurm of one node on loopback, for tests: munged, slurmctld and slurmd, which end with the test."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from ports import free_ports
from processes import left_after, logs

PROGRAMS = ["/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "munge", "srun", "salloc", "sinfo"]
START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 10
CONFIG = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


class Slurm:
    """The daemons, with keys, sockets, state and logs in ``folder``. Where they cannot run the test is skipped."""

    def __init__(self, folder: Path) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            pytest.skip(f"Slurm is not installed: found no {', '.join(missing)}; expected Debian's slurm-wlm and munge")
        host = socket.gethostname()
        if os.geteuid() != 0 or subprocess.run(["getent", "hosts", host], capture_output=True).returncode != 0:
            pytest.skip(f"Slurm's daemons need root, and an address of this host's name ({host})")
        self.folder, self.environment = folder, {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("spool", "state"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(bytes(128))
        (folder / "munge.key").chmod(0o600)
        control, node = free_ports(2)
        config = CONFIG.format(host=host, folder=folder, control=control, node=node)
        (folder / "slurm.conf").write_text(config)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]
        try:
            self._start("/usr/sbin/munged", "--foreground", "--force", "--num-threads=1", *options)
            self._await(["munge", "-n", "-S", f"{folder}/munge.socket"], "MUNGE:")
            self._start("/usr/sbin/slurmctld", "-D", "-c")
            self._start("/usr/sbin/slurmd", "-D")
            self._await(["sinfo", "-h", "-o", "%t"], "idle")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the daemons, the last one first, and the processes of jobs, which slurmd leaves."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        left_after(0, self.environment["SLURM_CONF"])

    def _start(self, program: str, *arguments: str) -> None:
        null, environment = subprocess.DEVNULL, {**os.environ, **self.environment}
        with open(self.folder / f"{Path(program).name}.log", "wb") as log:
            daemon = subprocess.Popen([program, *arguments], stdin=null, stdout=log, stderr=log, env=environment)
        self._daemons.append(daemon)

    def _await(self, command: list[str], expected: str) -> None:
        """Repeats a command until its output has this text."""
        end, environment = time.monotonic() + START_SECONDS_MAX, {**os.environ, **self.environment}
        while expected not in subprocess.run(command, env=environment, capture_output=True, text=True).stdout:
            assert time.monotonic() < end, f"{command} has not said {expected}: {logs(self.folder)}"
            time.sleep(0.05)
