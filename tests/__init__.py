from imagebuild.core.fields import Model

# Set this before any other model is imported: the schemas and the reference of files contain the docstrings of fields.
Model.model_config["use_attribute_docstrings"] = True
