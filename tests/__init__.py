from imagebuild.core.fields import Model

# Before any other type is imported: schemas, and the reference of files, say what the docstrings of fields say.
Model.model_config["use_attribute_docstrings"] = True
