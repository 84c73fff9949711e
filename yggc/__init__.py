"""yggc: compiles a drafter and a verifier into a bundle for yggrt."""

__version__ = "0.1.0"
