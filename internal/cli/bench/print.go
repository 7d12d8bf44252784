package bench

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// Print writes the report as a table for people.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "measure\tn\tp50\tp90\tp99\tunit\trate/s\tfloor\t× floor\tpeers\t")
	for _, x := range r.Results {
		rate, floor, ratio := "", "", ""
		if x.RatePerS > 0 {
			rate = fmt.Sprintf("%.1f", x.RatePerS)
		}
		if x.Floor > 0 {
			floor, ratio = fmt.Sprintf("%.2f", x.Floor), fmt.Sprintf("%.1f", x.P50/x.Floor)
		}
		var peers []string
		for _, name := range slices.Sorted(maps.Keys(x.Peers)) {
			peers = append(peers, fmt.Sprintf("%s %.1f (%.1f×)", name, x.Peers[name], x.Peers[name]/x.P50))
		}
		fmt.Fprintf(t, "%s\t%d\t%.2f\t%.2f\t%.2f\t%s\t%s\t%s\t%s\t%s\t\n", x.Name, x.N, x.P50, x.P90, x.P99, x.Unit, rate, floor, ratio, strings.Join(peers, ", "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, x := range r.Results {
		if len(x.Steps) > 0 {
			fmt.Fprintf(w, "%s, p50 of its steps (those of a prefix are part of the step of that name), %s:\n", x.Name, x.Unit)
			for _, step := range slices.Sorted(maps.Keys(x.Steps)) {
				fmt.Fprintf(w, "  %-28s %8.3f\n", step, x.Steps[step])
			}
		}
		if x.Note != "" {
			fmt.Fprintf(w, "%s: %s\n", x.Name, x.Note)
		}
	}
	_, err := fmt.Fprintf(w, "on %s, %s cpus, kernel %s\n", r.Machine["cpu"], r.Machine["cpus"], r.Machine["kernel"])
	return err
}
