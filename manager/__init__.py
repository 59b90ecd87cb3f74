"""The tokenizer manager of an LLM server, built on shared-memory rings."""
