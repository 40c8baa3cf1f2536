"""A load client for OpenAI-compatible servers: when requests go out, what they ask, what was heard, what it means."""
