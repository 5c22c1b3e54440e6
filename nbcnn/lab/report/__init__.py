"""This package makes one HTML file of a run or of a device's results: readable on a phone, light and dark, with nothing fetched from a network.

page      the skeleton, its style, tables and pictures
svg       charts as inline SVG, coloured by the page's style
source    what there is to show: a run folder, a results file, or both
story     the run: headline, environment, commands, curves, reconstructions, memory, confusion matrix
bench     what was measured: ladder, roofline, time, everything beside its peers
studies   convolution of series, fused and small works, the classifier, several GPUs
write     all sections in their order, and what was not measured
"""
