# Its kernel module is the host's.
if [ ! -e /dev/gdrdrv ]; then
  echo 'no /dev/gdrdrv here: the host has not loaded gdrdrv, or the container was not given it'
  exit 77
fi
"$PROGRAM"
