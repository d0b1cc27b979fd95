"""What each rank runs for ``hvkit.spark.run``: ``python -m hvkit.spark.rank``."""

from __future__ import annotations

import os

FILES = "HVKIT_SPARK_FILES"
"""Environment variable of ranks: the folder with the files that Spark has shipped, if any."""


def main() -> None:
    """Call the function; ``pyspark.SparkFiles`` finds files as in Spark's own tasks."""
    # Not at the top: Spark's tasks need only the name above.
    from hvkit.functions import rank

    if root := os.environ.pop(FILES, ""):
        from pyspark import SparkFiles

        SparkFiles._root_directory = root
        SparkFiles._is_running_on_worker = True
    rank.main()


if __name__ == "__main__":
    main()
