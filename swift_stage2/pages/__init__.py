"""Sections of sentences, tables and pictures (content), and the two forms of them (rendering)."""
