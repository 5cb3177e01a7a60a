# The init script, run afresh, against the environment that the image has in each of its ways.
hpcx-environment | sort > /tmp/derived
[ -s /tmp/derived ]
compare() {
  while IFS='=' read -r name value; do
    # A runtime image has nothing to compile with, and says so.
    case $name in LIBRARY_PATH | CPATH | PKG_CONFIG_PATH) [ -d /opt/hpcx/ucx/include ] || continue ;; esac
    here=$(sed -n "s/^$name=//p" "$2")
    # Lists hold what other components add, too.
    case $name in
      *PATH) case ":$here:" in *":$value:"*) continue ;; esac ;;
      *) if [ "$here" = "$value" ]; then continue; fi ;;
    esac
    echo "$1: $name is '$here', but HPC-X says '$value'"
    exit 1
  done < /tmp/derived
  echo "$1: as HPC-X says"
}
env > /tmp/here
compare container /tmp/here
env -i HOME=/root TERM=dumb bash -lc env > /tmp/login
compare 'login shell' /tmp/login
if [ -e /etc/ssh/sshd_config.d/20-environment.conf ]; then
  sed 's/^SetEnv //; s/" /\n/g; s/"//g' /etc/ssh/sshd_config.d/20-environment.conf > /tmp/ssh
  compare ssh /tmp/ssh
fi
