"""Sections of sentences, tables, charts and pictures, and the two forms that commands give them.

content    sentences, tables and charts, of which sections are made
pictures   images with boxes to page through
page       one HTML page that needs no network; its files are in page_files/
terminal   the same on a terminal, without charts and pictures
"""
