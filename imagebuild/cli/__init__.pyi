from .app import COMMANDS as COMMANDS
from .app import app as app
from .app import load_command as load_command
from .app import main as main
from .job import offer_of_plan as offer_of_plan
from .options import ProjectFiles as ProjectFiles
