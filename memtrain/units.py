"""Bytes, FLOPs, counts and times: conversion and formatting. The only place that divides by 2**30."""

KIB = 2**10
MIB = 2**20
GIB = 2**30


def gib(size_bytes: float) -> float:
    """Bytes to GiB."""
    return size_bytes / GIB


def format_bytes(size_bytes: float) -> str:
    """`1536 -> "1.5 KiB"`; three digits that mean something, the unit by size."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes:.0f} B"


def format_count(count: float) -> str:
    """`110_418_432 -> "110.4M"`, for parameters and tokens."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.1f}{name}"
    return f"{count:.0f}"


def format_flops(flops: float) -> str:
    """`3.1e12 -> "3.1 TFLOP"`."""
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(flops) >= unit:
            return f"{flops / unit:.1f} {name}"
    return f"{flops:.0f} FLOP"


def format_seconds(seconds_s: float) -> str:
    """`75.0 -> "1:15"`, `0.0123 -> "12.3 ms"`, `4.2 -> "4.2 s"`."""
    if seconds_s < 1:
        return f"{seconds_s * 1e3:.1f} ms"
    if seconds_s < 60:
        return f"{seconds_s:.1f} s"
    minutes, seconds = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
