"""Sections of sentences, tables and pictures (content), and the forms that commands give them (page, terminal)."""
