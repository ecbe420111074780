//go:build unix

package main

import (
	"cmp"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func versionCommand(out *output) *cobra.Command {
	o := &options{}
	c := &cobra.Command{
		Use:   "version",
		Short: "print the version of this program",
		Long: `Version prints the module's version, its revision if it was built in a checkout, and the
version of Go.`,
		RunE: func(*cobra.Command, []string) error {
			info, _ := debug.ReadBuildInfo()
			return o.show(out, newVersionView(info))
		},
	}
	o.jsonFlag(c)
	return c
}

// versionView is what version prints.
type versionView struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Time     string `json:"time,omitempty"` // of the revision
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
}

// newVersionView describes a build; nil is one without modules.
func newVersionView(info *debug.BuildInfo) versionView {
	if info == nil {
		info = &debug.BuildInfo{}
	}
	v := versionView{Version: cmp.Or(info.Main.Version, "(unknown)"), Go: cmp.Or(info.GoVersion, "(unknown)")}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			v.Revision = setting.Value
		case "vcs.time":
			v.Time = setting.Value
		case "vcs.modified":
			v.Modified = setting.Value == "true"
		}
	}
	return v
}

func (v versionView) String() string {
	line := "tenure " + v.Version
	if v.Revision != "" {
		line += ", revision " + v.Revision
		if v.Time != "" {
			line += " of " + v.Time
		}
		if v.Modified {
			line += ", modified"
		}
	}
	return line + ", " + v.Go
}

func (v versionView) print(w io.Writer) error {
	_, err := fmt.Fprintln(w, v)
	return err
}
