"""Pages of HTML, as a reader gets them."""

from contextlib import closing
from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page holds: the texts of each kind of element, and attributes that point somewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.links = [], {}, []
        with closing(self):
            self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.texts.setdefault(tag, []).append("")
        self.links += [
            value for key, value in attrs if key in ("src", "href", "xlink:href", "data", "action")
        ]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in {*self.open}:
            self.texts[tag][-1] += data
