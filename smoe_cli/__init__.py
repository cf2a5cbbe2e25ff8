"""smoe: mixture-of-experts language models larger than memory, streamed from disk."""

__version__ = "0.1.0"
