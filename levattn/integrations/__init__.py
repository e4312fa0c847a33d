"""Adapters to other libraries. Import each by its own name, such as ``levattn.integrations.sklearn``."""
