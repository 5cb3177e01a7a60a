# GDRCopy needs a kernel module of the host.
if [ ! -e /dev/gdrdrv ]; then
  echo 'no /dev/gdrdrv: the host has not loaded the module gdrdrv, or the container does not have the device'
  exit 77
fi
"$PROGRAM"
