"""The sections `task` and `data` of a run that trains a segmenter."""
