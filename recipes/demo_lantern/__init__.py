"""LANTERN's demo: pictures of handwritten digits, their captions, and how good generated ones are."""
