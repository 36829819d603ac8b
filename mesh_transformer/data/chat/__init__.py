"""Conversations: templates, messages, and the instructions that training learns from."""
