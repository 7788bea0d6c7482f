#!/bin/sh
# What Python's packages in an image are, and under which licences: bill_of_materials.sh TOOLS PYTHON FOLDER
# writes FOLDER/sbom.cdx.json (CycloneDX 1.6) and FOLDER/licenses.md; TOOLS has the programs of cyclonedx-bom and pip-licenses.
set -eu
"$1/cyclonedx-py" environment --spec-version 1.6 --output-reproducible --output-file "$3/sbom.cdx.json" "$2"
"$1/pip-licenses" --python "$2" --with-system --from mixed --format markdown --with-urls --output-file "$3/licenses.md"
