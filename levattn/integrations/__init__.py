"""Adapters to other libraries, each a module that is imported by its own name: ``levattn.integrations.sklearn``."""
