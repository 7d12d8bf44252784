package cli

import (
	"testing"
	"time"
)

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{
		"0": 0, "4096": 4096, "1k": 1 << 10, "512m": 512 << 20, "512M": 512 << 20, "2GiB": 2 << 30, "2gb": 2 << 30, "1.5g": 3 << 29, "1 MiB": 1 << 20, "7b": 7, "1t": 1 << 40,
	} {
		if got, err := parseSize(s); err != nil || got != want {
			t.Errorf("%s: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "lots", "-1", "1x", "k", "1e3", "inf", "nan", "0x10", "9999999t", "1kk", "1_000"} {
		if got, err := parseSize(s); err == nil {
			t.Errorf("%s: %d", s, got)
		}
	}
}

func TestParseDuration(t *testing.T) {
	for s, want := range map[string]time.Duration{
		"0": 0, "90": 90 * time.Second, "1.5": 1500 * time.Millisecond, "2s": 2 * time.Second, "1h30m": 90 * time.Minute, "2d": 48 * time.Hour, "100ms": 100 * time.Millisecond,
	} {
		if got, err := parseDuration(s); err != nil || got != want {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "soon", "-1s", "-1", "d", "1w", "1e9d", "999999999999d", "."} {
		if got, err := parseDuration(s); err == nil {
			t.Errorf("%s: %v", s, got)
		}
	}
}

func TestParseRule(t *testing.T) {
	for s, want := range map[string]string{
		"pypi": `service:"pypi"`, "example.org": `domain:"example.org"`, "*.example.org:443": `domain:"*.example.org" port:443`,
		"10.0.0.0/8": `cidr:"10.0.0.0/8"`, "10.0.0.0/8:53/udp": `cidr:"10.0.0.0/8" port:53 protocol:"udp"`, "192.0.2.1:80": `cidr:"192.0.2.1/32" port:80`,
		"2001:db8::/32": `cidr:"2001:db8::/32"`, "pypi:443": `service:"pypi" port:443`,
	} {
		got, err := parseRule(s)
		if err != nil || squeeze(got.String()) != want {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", ":80", "a:0", "a:65536", "a:80/icmp", "a:x"} {
		if got, err := parseRule(s); err == nil {
			t.Errorf("%s: %v", s, got)
		}
	}
}

// squeeze takes out the second space that protobuf's text form puts in at random.
func squeeze(s string) string { return oneLine(s) }

func TestSplitSandbox(t *testing.T) {
	for s, want := range map[string][2]string{
		"abc:/x": {"abc", "/x"}, "abc:x:y": {"abc", "x:y"}, "abc:": {"abc", "."}, "/a:b": {"", "/a:b"}, "./a:b": {"", "./a:b"}, "a/b:c": {"", "a/b:c"}, ":x": {"", ":x"}, "plain": {"", "plain"},
	} {
		if sandbox, path := splitSandbox(s); sandbox != want[0] || path != want[1] {
			t.Errorf("%s: %q, %q", s, sandbox, path)
		}
	}
}

func TestPrintableDisarms(t *testing.T) {
	for s, want := range map[string]string{
		"a\x1b[31m\nb\u009b": `a\x1b[31m\x0ab\x9b`, "\u202egpj.exe": `\u202egpj.exe`, "a\u2066b\u200b": `a\u2066b\u200b`,
		"a\u2028b": `a\u2028b`, "größer 日本 \\x": "größer 日本 \\x", "\U000e0041": `\ue0041`, "\x9b1m\xff": `\x9b1m\xff`,
	} {
		if got := printable(s); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}
