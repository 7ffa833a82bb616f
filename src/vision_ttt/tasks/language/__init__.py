"""Language models: the next token of documents, packed to a context."""

from vision_ttt.tasks.language.config import LanguageSection

__all__ = ["LanguageSection"]
