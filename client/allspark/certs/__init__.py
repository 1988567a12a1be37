"""A development set of everything that secures a fleet: authority, certificates, tokens.

For a real fleet use your own authority; the layout of the files is the same (docs/security.md).
"""

from allspark.certs.write import CertsError, write_set

__all__ = ["CertsError", "write_set"]
