"""Sections of sentences, tables, charts and pictures, and the two forms that commands give them.

content    sentences, tables and charts, of which sections are made
chart      a chart as SVG
page       one HTML page without a script that needs no network; its template and style are in page_files/
terminal   the same on a terminal, without charts and pictures
"""
