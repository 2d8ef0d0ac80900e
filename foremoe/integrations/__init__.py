"""Adapters: foremoe inside the frameworks that train. Each imports its framework on use."""
