package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/sdk/go/harena"
)

func (a *app) layerCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "layer", Short: "Manage layers", Args: cobra.NoArgs, RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
	cmd.AddCommand(a.layerImport(), a.layerList(), a.layerShow(), a.layerTag(), a.layerRemove(), a.layerVerify(), a.layerGC(), a.layerReach(), a.layerPush())
	return cmd
}

func (a *app) layerImport() *cobra.Command {
	var o harena.ImportOptions
	cmd := &cobra.Command{
		Use: "import --name NAME[:TAG] [--kind KIND] SOURCE", Short: "Make a layer",
		Long: "Make a layer from SOURCE:\n  dir:PATH                       a directory of this machine\n  tar:PATH                       a tar, plain or gzip; tar:- reads standard input\n" +
			"  debootstrap:SUITE[:PKG,PKG]    Debian packages, fetched by the server\n  oci:PATH[:REF]                 an image as an OCI layout, directory or tar\n  docker-archive:PATH[:TAG]      an image as docker save writes it\n" +
			"  registry://REF                 an image of a registry, fetched by the server",
		Args: exactly(1, "a source"),
	}
	cmd.Flags().StringVar(&o.Name, "name", "", "`NAME`[:TAG] of the layer; the tag defaults to latest")
	cmd.Flags().StringVar(&o.Kind, "kind", "", "base (default), workspace, toolkit or vm-image")
	var collapse sizeValue
	cmd.Flags().Var(&collapse, "collapse", "merge consecutive layers of an image up to this many bytes of files (default 3GB)")
	cmd.Flags().StringVar(&o.Against, "against", "", "share content with these `LAYERS`, separated by commas; none: with none (default what NAME is now)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o.Collapse = int64(collapse)
		if o.Name == "" {
			return invalid("give --name NAME[:TAG]", "the layer has no name")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		p := a.newProgress()
		o.Source = args[0]
		existed := false
		o.Progress = func(i harena.ImportProgress) {
			existed = i.Existed
			p.report(i.Phase, i.Message, i.Done, i.Total)
		}
		layer, warnings, err := c.ImportLayer(cmd.Context(), o)
		p.end()
		if err != nil {
			return err
		}
		for _, w := range warnings {
			a.warn(w)
		}
		if a.json {
			return a.printImported(layer, existed)
		}
		fmt.Fprintf(a.Stdout, "%s %s\n", layer.GetDigest(), o.Name)
		return nil
	}
	return cmd
}

// printImported prints a layer, and whether it was there already.
func (a *app) printImported(l *harenav1.Layer, existed bool) error {
	raw, err := rawJSON(l)
	if err != nil {
		return err
	}
	return a.printJSON(json.RawMessage(fmt.Sprintf(`%s,"existed":%t}`, bytes.TrimSuffix(raw, []byte("}")), existed)))
}

func (a *app) layerList() *cobra.Command {
	var kind string
	cmd := &cobra.Command{
		Use: "ls", Short: "List layers", Args: exactly(0, "flags only"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Layers(cmd.Context(), kind)
			if err != nil {
				return err
			}
			if a.json {
				return printList(a, list)
			}
			var rows [][]string
			for _, l := range list {
				if l.GetProblem() != "" {
					a.warn(strings.Join(l.GetNames(), ", ") + ": " + oneLine(printable(l.GetProblem())))
				}
				rows = append(rows, []string{
					strings.Join(l.GetNames(), ","), l.GetKind(), short(l.GetDigest()), size(l.GetLogicalBytes()),
					size(l.GetUniqueBytes() + l.GetMetadataBytes()), fmt.Sprint(l.GetFiles()), age(l.GetCreated()), l.GetSource(),
				})
			}
			return a.table("NAMES KIND DIGEST SIZE STORED FILES AGE SOURCE", rows)
		},
	}
	cmd.Flags().StringVar(&kind, "kind", "", "only of this kind")
	return cmd
}

// short is a digest that a person can compare.
func short(digest string) string {
	_, hex, ok := strings.Cut(digest, ":")
	if !ok || len(hex) < 12 {
		return digest
	}
	return hex[:12]
}

func (a *app) layerShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show all about a layer, as JSON", Args: exactly(1, "a name or digest"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			l, err := c.Layer(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.printMessage(l)
		},
	}
}

func (a *app) layerTag() *cobra.Command {
	return &cobra.Command{
		Use: "tag SOURCE NAME[:TAG]", Short: "Point a name at a layer", Args: exactly(2, "a layer and a name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			l, err := c.TagLayer(cmd.Context(), args[0], args[1])
			if err != nil || !a.json {
				return err
			}
			return a.printMessage(l)
		},
	}
}

func (a *app) layerRemove() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove names of layers; `harena layer gc` frees what no name reaches",
		Long: "Remove names of layers. A name in the store that nodes share is removed for all nodes. Sandboxes keep their layers;\n`harena layer gc` frees what no name and no sandbox reaches.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return invalid("`harena layer ls` lists them", "no layer was named")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			removed := []map[string]string{}
			for _, name := range args {
				digest, err := c.RemoveLayer(cmd.Context(), name)
				if err != nil {
					return err
				}
				removed = append(removed, map[string]string{"name": name, "digest": digest})
			}
			if a.json {
				return a.printJSON(removed)
			}
			for _, r := range removed {
				fmt.Fprintln(a.Stdout, r["name"])
			}
			return nil
		},
	}
}

func (a *app) layerVerify() *cobra.Command {
	return &cobra.Command{
		Use: "verify NAME", Short: "Read a layer back and check every digest", Args: exactly(1, "a name or digest"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p := a.newProgress()
			problems, err := c.VerifyLayer(cmd.Context(), args[0], func(done, total int64) { p.report("verifying", "", done, total) })
			p.end()
			if err != nil {
				return err
			}
			if a.json {
				if problems == nil {
					problems = []string{}
				}
				err = a.printJSON(map[string]any{"name": args[0], "intact": len(problems) == 0, "problems": problems})
			} else {
				for _, s := range problems {
					fmt.Fprintln(a.Stdout, printable(s))
				}
			}
			if err == nil && len(problems) > 0 {
				err = &harena.Error{Kind: harena.KindInternal, Message: fmt.Sprintf("layer %s is damaged: %d problems", args[0], len(problems)), Hint: "import it again"}
			}
			if err == nil && !a.json {
				fmt.Fprintf(a.Stdout, "%s is intact\n", args[0])
			}
			return err
		},
	}
}

// progress reports long work on standard error: one line that is written over on
// a terminal, a line a phase and every few seconds elsewhere, nothing with --json.
type progress struct {
	a     *app
	mode  string // line, lines, none
	phase string
	drawn time.Time
	width int
}

func (a *app) newProgress() *progress {
	p := &progress{a: a, mode: "lines"}
	if _, ok := terminal(a.Stderr); ok {
		p.mode = "line"
	}
	if a.json {
		p.mode = "none"
	}
	return p
}

// redraw is how often the line changes at most, and another one of the same phase is written where lines stay.
const (
	redraw = 100 * time.Millisecond
	relist = 10 * time.Second
)

func (p *progress) report(phase, message string, done, total int64) {
	text := phase
	if message != "" {
		text += ": " + oneLine(printable(message))
	}
	// A line that stays begins a phase, or tells 10 seconds later how far it got.
	if p.mode == "line" || phase == p.phase {
		if done > 0 {
			text += " " + size(done)
		}
		if total > 0 {
			text += fmt.Sprintf(" of %s (%d%%)", size(total), done*100/total)
		}
	}
	switch {
	case p.mode == "none" || phase == "done":
	case p.mode == "lines":
		if phase != p.phase || time.Since(p.drawn) >= relist {
			p.phase, p.drawn = phase, time.Now()
			fmt.Fprintln(p.a.Stderr, text)
		}
	case time.Since(p.drawn) >= redraw || phase != p.phase:
		p.phase, p.drawn = phase, time.Now()
		text = cut(text, 100)
		fmt.Fprintf(p.a.Stderr, "\r%-*s", p.width, text)
		p.width = len(text)
	}
}

func (p *progress) end() {
	if p.mode == "line" && p.width > 0 {
		fmt.Fprintf(p.a.Stderr, "\r%-*s\r", p.width, "")
	}
}
