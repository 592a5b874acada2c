"""Its place makes ``tests/`` importable, so that test files share the stand-ins that lie beside it."""
