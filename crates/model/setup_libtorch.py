#!/usr/bin/env python3
"""Brings libtorch 2.13.0 (CPU parts) into the folder given, which LIBTORCH then names.

The PyTorch wheel for x86-64 Linux is a CUDA build of 527 MB; its CPU parts are 486 MB unpacked. libtorch_cpu.so wants libcudart and
libcupti even for CPU work, so these two come from their own small wheels. pip resolves where the wheels are, so its configuration
(index, proxy, certificates) is honoured; the download itself is ours, so that a broken one resumes and every file is checked against
the hash below. Nothing is installed outside the folder.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

TORCH_VERSION = "2.13.0"
# requirement, file size in bytes, SHA-256, and which members go where
WHEELS = [
    (
        "torch==2.13.0",
        526574961,
        "60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7",
        lambda name: name[len("torch/"):]
        if name.startswith("torch/include/")
        or name in ("torch/lib/libtorch_cpu.so", "torch/lib/libc10.so", "torch/lib/libgomp.so.1")
        else "LICENSES/" + Path(name).name
        if ".dist-info/" in name and Path(name).name in ("LICENSE", "NOTICE")
        else None,
    ),
    (
        "nvidia-cuda-runtime==13.0.96",
        2243632,
        "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        lambda name: "lib/libcudart.so.13" if name.endswith("/libcudart.so.13") else None,
    ),
    (
        "nvidia-cuda-cupti==13.0.85",
        10715597,
        "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
        lambda name: "lib/libcupti.so.13" if name.endswith("/libcupti.so.13") else None,
    ),
]
NEEDED_BYTES = 3 << 30
ENVIRONMENT = 30  # exit code: the environment lacks something (see README, exit codes)


def say(text):
    print(text, file=sys.stderr, flush=True)


def fail(message, hint):
    say(f"error: {message}\n\nhint: {hint}")
    sys.exit(ENVIRONMENT)


def check_host(target):
    if sys.version_info < (3, 8):
        fail(f"python3 is {platform.python_version()}; setup needs 3.8 or newer", "install a newer python3, or set LIBTORCH to a libtorch 2.13.0 of your own")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        fail(
            f"no libtorch is fetched for {platform.system()} on {platform.machine()}",
            "set LIBTORCH to a libtorch 2.13.0 of your own; importing, QA, SQL and reports work without one",
        )
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        fail(f"no C++ compiler: '{compiler}' was not found", "install g++ or clang++, or name yours with CXX=…")
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        fail(f"{target.parent}: {free >> 20} MiB free, setup needs {NEEDED_BYTES >> 20} MiB", "free some space, or set LIBTORCH to a libtorch 2.13.0 elsewhere")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        fail("python3 has no pip, which finds the download", "install pip for python3 (package python3-pip), or set LIBTORCH to a libtorch 2.13.0 of your own")


def locate(requirement):
    """The wheel's address, as pip resolves it."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--ignore-installed", "--no-deps",
        "--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_25_x86_64",
        "--platform", "manylinux2014_x86_64", "--target", "unused", "--report", "-", requirement,
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        return None, run.stderr.strip()
    return json.loads(run.stdout)["install"][0]["download_info"]["url"], ""


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def download(url, path, size):
    """Appends to what an earlier, broken download left."""
    for attempt in range(6):
        have = path.stat().st_size if path.exists() else 0
        if have > size:
            path.unlink()
            have = 0
        if have == size:
            return
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                resumed = reply.status == 206
                if have and resumed:
                    say(f"  resuming at {have >> 20} MiB")
                done, shown = (have if resumed else 0), time.monotonic()
                with open(path, "ab" if resumed else "wb") as file:
                    for chunk in iter(lambda: reply.read(1 << 20), b""):
                        file.write(chunk)
                        done += len(chunk)
                        if time.monotonic() - shown > 5:
                            shown = time.monotonic()
                            say(f"  {done >> 20} of {size >> 20} MiB")
        except (urllib.error.URLError, OSError) as error:
            if isinstance(error, OSError) and error.errno == 28:
                fail(f"{path}: the disk is full", "free some space and run make setup again; it resumes")
            say(f"  broken off ({error}); trying again")
            time.sleep(2**attempt)


def fetch(requirement, size, digest, cache):
    path = cache / (requirement.replace("==", "-") + ".whl")
    if path.exists() and path.stat().st_size == size and sha256(path) == digest:
        return path
    say(f"fetching {requirement} ({max(size >> 20, 1)} MiB)")
    url, error = locate(requirement)
    if url is None:
        fail(f"pip does not find {requirement}: {error.splitlines()[-1] if error else 'no answer'}", "check the network and pip's index settings, or set LIBTORCH to a libtorch 2.13.0 of your own")
    download(url, path, size)
    have = path.stat().st_size if path.exists() else 0
    if have != size:
        fail(f"{requirement}: {have} of {size} bytes arrived", "run make setup again; it resumes where it broke off")
    if sha256(path) != digest:
        path.unlink()
        fail(f"{requirement}: the file's SHA-256 is not the expected one; it was removed", "run make setup again; if it repeats, your index serves another file than the one Drillyard was tested with")
    return path


def unpack(wheel, choose, target):
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            place = None if info.is_dir() else choose(info.filename)
            if place is None:
                continue
            path = target / place
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, open(path, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)


def main():
    target = Path(sys.argv[1]).absolute()
    marker = target / "drillyard-setup.json"
    if marker.exists():
        return
    started = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    check_host(target)
    say(f"setting up libtorch {TORCH_VERSION} in {target.name}/ (once; about 540 MB to fetch, 486 MB kept)")
    cache = target.with_name(target.name + ".download")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    cache.mkdir(exist_ok=True)
    try:
        for requirement, size, digest, choose in WHEELS:
            unpack(fetch(requirement, size, digest, cache), choose, partial)
        os.symlink("libtorch_cpu.so", partial / "lib" / "libtorch.so")
        (partial / marker.name).write_text(json.dumps({"torch": TORCH_VERSION, "wheels": {w[0]: w[2] for w in WHEELS}}, indent=1) + "\n")
    except OSError as error:
        if error.errno == 28:
            fail(f"{target.parent}: the disk is full", "free some space and run make setup again; it resumes")
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    shutil.rmtree(cache)
    say(f"libtorch is ready ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
