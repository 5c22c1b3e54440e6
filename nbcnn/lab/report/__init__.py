"""This package shows what was measured: as one HTML file of a run or of a device's results, and as the tables of the pages in docs.

sections  the rows of a results file's sections as tables, one function for each kind: the only place where cells are made
tables    a table, written as Markdown or as HTML; origin: the line below it

The HTML file is readable on a phone, light and dark, with nothing fetched from a network:

page      the skeleton, its style, tables and pictures
svg       charts as inline SVG, coloured by the page's style
source    what there is to show: a run folder, a results file, or both
story     the run: headline, environment, commands, curves, reconstructions, memory, confusion matrix
bench     what was measured: ladder, roofline, time, everything beside its peers
studies   convolution of series, fused and small works, the classifier, several GPUs
write     all sections in their order, and what was not measured

The pages in docs: readme.py and readme_*.py have the paragraphs around the tables, kernels_page.py the page of kernels.
"""
