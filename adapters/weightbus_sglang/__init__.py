"""Hands a refit to a running SGLang server, over its HTTP API; sglang itself is never imported."""

from weightbus_sglang.adapter import SglangAdapter

__all__ = ["SglangAdapter"]
