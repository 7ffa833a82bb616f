"""Deletion and insertion curves of many maps: do they mark what a model uses?"""
