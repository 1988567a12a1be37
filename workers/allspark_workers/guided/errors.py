"""Why a request cannot be guided."""


class GuideError(ValueError):
    """The document, the vocabulary or their combination cannot be used; fails its own request only."""
