"""Put a program called nvidia-smi on PATH that lists the GPUs of a test."""

import os
import stat

A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"


def install(monkeypatch, folder, script):
    """Make `script`, lines of a shell, the only nvidia-smi on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def machine(monkeypatch, folder, *names, mig=""):
    """Have nvidia-smi list GPUs of these names, with UUIDs GPU-0000..., GPU-1111..., ... and the parts of `mig`."""
    lines = [f"{i}, GPU-{str(i) * 8}-ab, {name}, 00000000:{7 + 8 * i:02X}:00.0" for i, name in enumerate(names)]
    listed, parts = "\n".join(lines), mig.strip("\n")
    install(monkeypatch, folder, f"if [ $1 = -L ]; then cat <<'E'\n{parts}\nE\nelse cat <<'E'\n{listed}\nE\nfi")
