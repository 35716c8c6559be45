"""``make image-check``: the Dockerfile's steps, one by one, in a clean root, without Docker; then
the server out of it, as the image's user, with a read-only root.

The base image is a root of Debian 12 made by debootstrap: it has what debian:12-slim has, but for
documentation. Needs root, debootstrap, a network, ten minutes and some 8 GB. What Docker would
take from its daemon (name servers, certificates, pip's settings) is copied from this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from k8s.tools.dockerfile import Stage, Step, assignments, command, filled, read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
#: Copied into the root: a step that changes them, as ca-certificates' does, changes the copy.
_MACHINE_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/xdg/pip")
_MACHINE_CA = "/etc/ssl/certs/ca-certificates.crt"
_CA = "/run/machine-ca.crt"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 300.0


class Image:
    """A root folder and what the instructions have set so far."""

    def __init__(self, root: Path, arguments: dict[str, str]) -> None:
        self.root = root
        self.env = {"PATH": _PATH}
        self.workdir = "/"
        self.user = "0:0"
        self.cmd: list[str] = []
        self._given = arguments
        self._arguments: dict[str, str] = {}

    def do(self, step: Step, built: dict[str, Image]) -> None:
        """Carry out one instruction."""
        seen = {**self._arguments, **self.env}
        if step.name == "RUN":
            print(f"RUN {step.text[:110]}", flush=True)
            self._run(step.text)
        elif step.name == "COPY":
            self._copy(step.text, built)
        elif step.name == "ENV":
            self.env |= assignments(step.text, seen)
        elif step.name == "ARG":
            name, _, value = step.text.partition("=")
            self._arguments[name] = self._given.get(name, value.strip('"'))
        elif step.name == "WORKDIR":
            self.workdir = filled(step.text, seen)
            self._inside(self.workdir).mkdir(parents=True, exist_ok=True)
        elif step.name == "USER":
            self.user = step.text
        elif step.name == "CMD":
            self.cmd = command(step.text)

    def _run(self, text: str) -> None:
        lend_files(self.root)
        subprocess.run(
            chrooted(self, ["/bin/sh", "-ec", text]),
            env={**machine_env(), **self._arguments, **self.env},
            check=True,
        )

    def _copy(self, text: str, built: dict[str, Image]) -> None:
        words = text.split()
        origin = ROOT
        if words[0].startswith("--from="):
            origin = built[words.pop(0).removeprefix("--from=")].root
        *sources, target = words
        for source in sources:
            found = origin / source.lstrip("/")
            place = self._inside(target)
            if found.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, place, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                place = place / found.name if target.endswith("/") else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, place)

    def _inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def machine_env() -> dict[str, str]:
    """Settings of this machine's pip, its certificates, and nothing else of its environment."""
    own = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return {**own, "PIP_CERT": _CA, "SSL_CERT_FILE": _CA}


def lend_files(root: Path) -> None:
    """Copy into a root what Docker would take from its daemon."""
    for path in _MACHINE_FILES:
        place = root / path.lstrip("/")
        if Path(path).is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True)
        elif Path(path).is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            shutil.copyfile(path, place)
    place = root / _CA.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_MACHINE_CA, place)


def machine_folders() -> list[str]:
    """Folders of packages that this machine's pip looks into."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout.replace("'", " ")
    words = [word.removeprefix("file://") for word in listed.split()]
    return [word for word in words if word.startswith("/") and Path(word).is_dir()]


def chrooted(image: Image, words: list[str], read_only: bool = False) -> list[str]:
    """The command line that runs ``words`` in an image, in a mount namespace of its own.

    Nothing of this machine can be written from inside: what is mounted is either the root's own,
    fresh, or read-only.
    """
    root = image.root
    lines = ["set -e", "mount --make-rprivate /", f"mount --bind {root} {root}"]
    for folder in machine_folders():
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        lines.append(f"mount --bind -o ro {folder} {root}{folder}")
        lines.append(f"mount -o remount,bind,ro {root}{folder}")
    lines += [f"mount -t proc proc {root}/proc", f"mount -t tmpfs -o mode=755 dev {root}/dev"]
    lines.append(f"mkdir {root}/dev/shm && mount -t tmpfs -o mode=1777 shm {root}/dev/shm")
    for name in _DEVICES:
        lines.append(f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}")
    lines.append(f"ln -s /proc/self/fd {root}/dev/fd")
    if read_only:
        lines.append(f"mount -o remount,bind,ro {root}")
        uid, _, gid = image.user.partition(":")
        options = f"mode=1777,uid={uid},gid={gid}"
        lines += [
            f"mount -t tmpfs -o {options} tmpfs {root}{at}" for at in ("/tmp", "/home/specdec")
        ]
    userspec = f"--userspec={image.user}"
    # by its path: the image's own PATH, which the command is to see, need not lead to it
    chroot = shutil.which("chroot", path=_PATH) or "/usr/sbin/chroot"
    lines.append(f'exec {chroot} {userspec} {root} /usr/bin/env -C "{image.workdir}" "$@"')
    return ["unshare", "-m", "sh", "-c", "\n".join(lines), "sh", *words]


def build(target: str, folder: Path, arguments: dict[str, str]) -> Image:
    """Build a stage and those that it needs.

    Raises:
        subprocess.CalledProcessError: a step fails.
    """
    stages = read_dockerfile(ROOT / "Dockerfile")
    built: dict[str, Image] = {}
    wanted = needed(stages, target)
    for stage in (stage for name, stage in stages.items() if name in wanted):
        root = folder / stage.name
        image = Image(root, arguments)
        if stage.parent in built:
            below = built[stage.parent]
            subprocess.run(["cp", "-a", str(below.root), str(root)], check=True)
            image.env, image.workdir, image.user = dict(below.env), below.workdir, below.user
            image.cmd = below.cmd
        else:
            print(f"FROM {stage.parent}: debootstrap", flush=True)
            subprocess.run(
                ["debootstrap", "--variant=minbase", "bookworm", str(root)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        for step in stage.steps:
            image.do(step, built)
        built[stage.name] = image
    return built[target]


def missing() -> str | None:
    """What keeps this process from making roots; None where nothing does."""
    if os.geteuid() != 0:
        return "clean roots are made with chroot and mounts: run it as root"
    for tool, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"clean roots need {tool}: apt-get install {package}"
    return None


def needed(stages: dict[str, Stage], target: str) -> set[str]:
    """A stage, those below it and those that it copies from."""
    found, left = set[str](), [target]
    while left:
        name = left.pop()
        if name in stages and name not in found:
            found.add(name)
            left.append(stages[name].parent)
            left += [
                step.text.split()[0].removeprefix("--from=")
                for step in stages[name].steps
                if step.text.startswith("--from=")
            ]
    return found


def serve(image: Image, port: int = 8000) -> None:
    """Start the image's command as its user on a read-only root, and ask it something.

    Raises:
        AssertionError: it runs as root, can write to its root, or does not answer.
    """
    env = {**image.env, "HOME": "/home/specdec"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = chrooted(image, list(words), read_only=True)
        return subprocess.run(line, env=env, capture_output=True, text=True)

    who = run("id", "-u")
    uid = image.user.partition(":")[0]
    assert who.stdout.strip() == uid != "0", f"not the image's user: {who.stdout}{who.stderr}"
    for path in ("/opt/specdec/x", "/opt/specdec/cache/x", "/etc/x"):
        assert run("touch", path).returncode != 0, f"{path} can be written"
    assert run("bash", "-lc", "command -v ray").returncode == 0, "a login shell finds no ray"
    server = subprocess.Popen(chrooted(image, image.cmd, read_only=True), env=env)
    try:
        began = time.monotonic()
        body = b'{"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 8}'
        answer = b""
        while not answer:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() - began < _START_S, "the server does not answer"
            time.sleep(1)
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                body,
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as found:
                    answer = found.read()
            except (OSError, urllib.error.URLError):
                continue
        print(f"answered after {time.monotonic() - began:.0f} s as user {uid}: {answer[:200]!r}")
    finally:
        server.terminate()
        server.wait(60)


def main() -> int:
    """Build and serve."""
    parser = argparse.ArgumentParser(description="The Dockerfile's steps in a clean root.")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if (problem := missing()) is not None:
        print(problem, file=sys.stderr)
        return 2
    arguments = dict(pair.split("=", 1) for pair in options.build_arg)
    folder = Path(tempfile.mkdtemp(prefix="image-check-"))
    try:
        serve(build(options.target, folder, arguments))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
