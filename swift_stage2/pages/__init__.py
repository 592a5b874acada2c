"""Sections of sentences, tables, charts and pictures, and the two forms that commands give them.

content    sentences, tables and charts, of which sections are made
page       one HTML page, charts as SVG, without a script or a network; template and style are in page_files/
terminal   the same on a terminal, without charts and pictures
"""
