"""The load of this host: CPU, memory, network and GPUs, from ``psutil`` and ``nvidia-ml-py``."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import psutil


class HostLoad:
    """The load of this host since the last ``read``."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        psutil.cpu_percent()
        self._since, self._net = time.monotonic(), _network()

    def read(self) -> dict[str, float]:
        """The load by name.

        ``cpu`` (percent of all CPUs), ``memory`` (percent), ``sent_mb_s`` and ``received_mb_s``
        (10^6 bytes a second, over all interfaces but loopback); with NVIDIA GPUs also ``gpu``
        (percent, mean over GPUs) and ``gpu_memory`` (percent, of the fullest).
        """
        now, net = time.monotonic(), _network()
        seconds = max(now - self._since, 1e-9)
        load = {
            "cpu": psutil.cpu_percent(),
            "memory": psutil.virtual_memory().percent,
            "sent_mb_s": (net[0] - self._net[0]) / seconds / 1e6,
            "received_mb_s": (net[1] - self._net[1]) / seconds / 1e6,
        }
        self._since, self._net = now, net
        return load | self._gpus()

    def _gpus(self) -> dict[str, float]:
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            used = [nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in gpus]
            memory = [nvml.nvmlDeviceGetMemoryInfo(gpu) for gpu in gpus]
        except nvml.NVMLError:  # a driver that is being updated, or a GPU that has failed
            return {}
        if not gpus:
            return {}
        return {
            "gpu": sum(used) / len(used),
            "gpu_memory": max(100.0 * each.used / each.total for each in memory),
        }


def _nvml() -> Any:
    """NVIDIA's library; None on a host without it, or without a GPU."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _network() -> tuple[int, int]:
    """Bytes that this host has sent and received."""
    interfaces = psutil.net_io_counters(pernic=True)
    counted = [each for name, each in interfaces.items() if name != "lo"]
    return sum(each.bytes_sent for each in counted), sum(each.bytes_recv for each in counted)
