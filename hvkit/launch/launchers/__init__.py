"""The programs that start ranks, a module for each, and which of them is there."""

from hvkit.launch.launchers.found import NAMES, Launcher, find_launcher

__all__ = ["NAMES", "Launcher", "find_launcher"]
