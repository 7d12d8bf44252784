package cli

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"
)

// sizeValue is a flag of bytes: 512m, 2GiB, 1.5g, 4096. Multiples are of 1,024.
type sizeValue int64

// Size is that flag for the commands of servers.
type Size = sizeValue

func (v *sizeValue) String() string { return strconv.FormatInt(int64(*v), 10) }
func (v *sizeValue) Type() string   { return "SIZE" }
func (v *sizeValue) Set(s string) error {
	n, err := parseSize(s)
	*v = sizeValue(n)
	return err
}

func parseSize(s string) (int64, error) {
	lower := strings.ToLower(strings.TrimSpace(s))
	digits := strings.TrimRight(lower, "kmgtib")
	unit := lower[len(digits):]
	power, ok := map[string]int{"": 0, "b": 0, "k": 1, "kb": 1, "ki": 1, "kib": 1, "m": 2, "mb": 2, "mi": 2, "mib": 2, "g": 3, "gb": 3, "gi": 3, "gib": 3, "t": 4, "tb": 4, "ti": 4, "tib": 4}[unit]
	f, err := strconv.ParseFloat(strings.TrimSpace(digits), 64)
	n := f * math.Pow(1024, float64(power))
	if err != nil || !ok || !(f >= 0) || n >= math.MaxInt64 || strings.ContainsAny(digits, "einx_p") {
		return 0, fmt.Errorf("%q is not a size; use a number of bytes, or with a unit such as 512m or 2GiB", s)
	}
	return int64(n), nil
}

// durationValue is a flag of time: 30s, 5m, 2h, 1d, or a number of seconds.
type durationValue struct {
	d   time.Duration
	set bool
}

func (v *durationValue) String() string {
	if !v.set {
		return ""
	}
	return v.d.String()
}
func (v *durationValue) Type() string { return "D" }
func (v *durationValue) Set(s string) error {
	d, err := parseDuration(s)
	v.d, v.set = d, err == nil
	return err
}

func parseDuration(s string) (time.Duration, error) {
	bad := fmt.Errorf("%q is not a duration; use 30s, 5m, 2h, 1d or a number of seconds", s)
	unit := time.Duration(0)
	number := s
	if days, ok := strings.CutSuffix(s, "d"); ok {
		unit, number = 24*time.Hour, days
	} else if strings.Trim(s, "0123456789.") == "" {
		unit = time.Second
	}
	if unit == 0 {
		d, err := time.ParseDuration(s)
		if err != nil || d < 0 {
			return 0, bad
		}
		return d, nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || !(f >= 0) || f*float64(unit) >= math.MaxInt64 {
		return 0, bad
	}
	return time.Duration(f * float64(unit)), nil
}

// pairsValue is a repeated flag of K=V. With env, K alone takes the value from the client's environment.
type pairsValue struct {
	m   map[string]string
	env bool
}

func (v *pairsValue) String() string { return "" }
func (v *pairsValue) Type() string   { return "K=V" }
func (v *pairsValue) Set(s string) error {
	k, value, ok := strings.Cut(s, "=")
	if !ok && v.env {
		if value, ok = os.LookupEnv(k); !ok {
			return nil // as docker does: a variable that is not set is not passed on
		}
	}
	if !ok || k == "" {
		return fmt.Errorf("%q is not of the form K=V", s)
	}
	if v.m == nil {
		v.m = map[string]string{}
	}
	v.m[k] = value
	return nil
}
