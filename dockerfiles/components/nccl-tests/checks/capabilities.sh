# A fat binary consists of a header and parts. Each part has a header with its kind and its compute capability.
cat > /tmp/capabilities.pl <<'EOF'
use strict;
my ($list, @paths) = @ARGV;
my @wanted = do { open(my $file, '<', $list) or die "$list: $!\n"; split(' ', <$file>) };
for my $path (@paths) {
  open(my $file, '<:raw', $path) or die "$path: $!\n";
  my $data = do { local $/; <$file> };
  my (%code, %ptx);
  while ($data =~ /\x50\xed\x55\xba\x01\x00\x10\x00/g) {
    my $part = pos($data) + 8;
    my $end = $part + unpack('Q<', substr($data, $part - 8, 8));
    while ($part < $end) {
      my ($kind, undef, $header, $size) = unpack('S< S< L< Q<', substr($data, $part, 16));
      my $capability = unpack('L<', substr($data, $part + 28, 4));
      if ($kind == 1) { $ptx{$capability} = 1 } else { $code{$capability} = 1 }
      $part += $header + $size;
    }
  }
  print "$path: code for @{[sort keys %code]}, PTX for @{[sort keys %ptx]}\n";
  for (@wanted) { die "no code for $_\n" unless $code{$_} }
  # There is PTX only if the matrix lists several capabilities.
  die "no PTX for $wanted[-1]\n" unless @wanted == 1 || $ptx{$wanted[-1]};
}
EOF
tests=/opt/nccl-tests
perl /tmp/capabilities.pl $tests/capabilities $tests/build/all_reduce_perf $tests/build/verifiable/libverifiable.so
