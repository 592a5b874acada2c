"""Data sets and predictions: rows checked, turned from and into other formats, and detections measured.

files, picture                   whose files, and what is wrong with a line; stored images
row_check, survey                one row against every rule; all rows of all files: ``swift-stage2 data check``
sources                          what formats share: issues and how often, spelling of labels, pictures, numbers
coco_file, yolo_folder, voc_folder   the three formats in
import_command                   boxes on the picture that is there, prompts, answers: ``swift-stage2 import``
export_command                   rows or predictions as COCO's JSON
prediction, scores               rows with their truth, and predictions beside them; every metric of one set
point_scores, regions            the same of points; masks and boxes in which a point is right
counted_scores                   what both count, by image and part
recorded                         what an evaluation during training leaves in RUN_DIR/evaluations
drawing                          one row as a picture
"""
