"""Turns data sets that other programs wrote into rows, and rows into COCO: ``import`` and ``export``.

exact_numbers     coordinates as decimals, so that nothing is rounded on the way in and out
tally             each oddity of a source: how often, and what became of it; the summary
annotated_image   a picture's name, labels and boxes as a source gives them; spelling of labels
json_arrays       arrays of a JSON file, element by element
coco_file         COCO's JSON in, 48 bytes per annotation
yolo_folder       YOLO's label files in
voc_folder        Pascal VOC's XML in
page_folder       web pages in: which views of them are drawn, and which elements can be seen
page_browser      Chromium, which shows a page and reaches nothing else; page_elements.js finds the elements there
placement         boxes on the picture that is there: clipped, or dropped
row_style         prompts, answers and orders; the rows of a picture
import_command    ``swift-stage2 import``
coco_export       rows or predictions as COCO's JSON
export_command    ``swift-stage2 export``
"""
