nccl=$(ldconfig -p | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1)
# Search for the newest interface first, as NCCL does.
accepted=$(grep -a -o -E 'ncclNetPlugin_v[0-9]+' "$nccl" | sort -u -V -r)
# shellcheck disable=SC2086
perl - /opt/aws-ofi-nccl/lib/libnccl-net-ofi.so $accepted <<'PERL'
require DynaLoader;
my ($library, @accepted) = @ARGV;
my $plugin = DynaLoader::dl_load_file($library, 0) or die DynaLoader::dl_error(), "\n";
for my $symbol (@accepted) {
  my $address = DynaLoader::dl_find_symbol($plugin, $symbol, 1) or next;
  # The first field of the structure is a pointer to the name.
  my $name = unpack "p", unpack "P8", pack "J", $address;
  print "NCCL takes $symbol of $name\n";
  exit;
}
die "the plug-in has none of the interfaces that this NCCL supports: @accepted\n";
PERL
