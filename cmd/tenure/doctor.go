//go:build unix

package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/stores/mysqltenure"
)

const (
	doctorTimeout = 9 * time.Second // of the examination; a store that hangs takes 5 s more to close
	openTimeout   = 4 * time.Second // of a step of it that can be slow
)

// The exit statuses of tenure doctor for a store that has answered.
const (
	exitWarned = 3
	exitUnfit  = 4
)

func doctorCommand(out *output) *cobra.Command {
	o := &options{}
	var replicas int
	var look time.Duration
	c := &cobra.Command{
		Use:   "doctor --store STORE [--replicas NUMBER] [--look TIME]",
		Short: "say whether a store is fit for leases, and what to change",
		Long: `Doctor connects as a replica would, asks the store for its settings, and holds a lease of
its own for a few seconds to measure it. It says what kind of server this is, what is wrong
with it or worth knowing, how long renewals and wake-ups take, what the server's clock
does, and which TTL suits it. It writes only under a key of the type tenure.doctor, and
creates no table. It takes at most 15 s. docs/operations.md explains its findings.

The exit status is 0 if the store is fit, 3 if something should be changed, and 4 if it
can't be used as it is.`,
		PreRunE: func(*cobra.Command, []string) error {
			switch {
			case replicas < 1:
				return usageError("--replicas %d is below 1", replicas)
			case look == 0 || look > 6*time.Second:
				return usageError("--look %v is not between 0s and 6s", look)
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), doctorTimeout)
			defer cancel()
			d, err := o.store.examine(ctx, replicas, look)
			if err != nil {
				return err
			}
			_, status := d.result()
			return cmp.Or(o.show(out, d), status)
		},
	}
	o.storeFlags(c)
	c.Flags().IntVar(&replicas, "replicas", 3, "`NUMBER` of replicas that will use the store")
	c.Flags().DurationVar(&look, "look", 5*time.Second, "`TIME` to measure for, at most 6s")
	o.jsonFlag(c)
	return c
}

// The levels of findings.
const (
	levelNote    = "note"    // worth knowing
	levelWarning = "warning" // should be changed
	levelFault   = "fault"   // the store can't be used as it is
)

// finding is one thing that doctor has found. The zero value is none.
type finding struct {
	Level  string `json:"level"`
	Check  string `json:"check"` // its name in the documents
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

func warning(text, remedy string) finding { return finding{levelWarning, "", text, remedy} }
func fault(text, remedy string) finding   { return finding{levelFault, "", text, remedy} }

// diagnosis is what doctor prints. Durations are in milliseconds and missing if they were not measured.
type diagnosis struct {
	Server   string    `json:"server"` // what kind of server this is
	Fit      bool      `json:"fit"`    // there is no fault
	Findings []finding `json:"findings"`

	Renewals   int          `json:"renewals"`
	RenewalP50 float64      `json:"renewal_p50_ms,omitempty"`
	RenewalP99 float64      `json:"renewal_p99_ms,omitempty"`
	WakeUp     float64      `json:"wake_up_ms,omitempty"` // the median
	Clock      *clockReport `json:"clock,omitempty"`      // nil: the store has none
	TTL        float64      `json:"recommended_ttl_seconds,omitempty"`
}

func (d *diagnosis) add(check string, f finding) {
	if f.Level != "" {
		f.Check, f.Text = check, printable(f.Text)
		d.Findings = append(d.Findings, f)
	}
}

func (d *diagnosis) has(level string) bool {
	return slices.ContainsFunc(d.Findings, func(f finding) bool { return f.Level == level })
}

// result returns the diagnosis in a word, and its exit status.
func (d *diagnosis) result() (string, error) {
	switch {
	case d.has(levelFault):
		return "unfit: see the faults", exitStatus(exitUnfit)
	case d.has(levelWarning):
		return "fit, with warnings", exitStatus(exitWarned)
	}
	return "fit", nil
}

func (d *diagnosis) print(w io.Writer) error {
	table := newSheet(w)
	table.line("server", "%s", d.Server)
	if d.Renewals > 0 {
		table.line("renewal", "p50 %.1f ms, p99 %.1f ms (of %d)", d.RenewalP50, d.RenewalP99, d.Renewals)
	}
	if d.WakeUp > 0 {
		table.line("wake-up", "%.1f ms", d.WakeUp)
	}
	if d.Clock != nil {
		table.line("clock", "%+.0f ms from this machine's, %+.2f %% in rate (give or take %.2f)", d.Clock.OffsetMS, d.Clock.RatePercent, d.Clock.UncertainPercent)
	}
	if d.TTL > 0 {
		table.line("TTL", "%v, into which a hundred slow renewals fit; choose more if the database is away for longer than %v when it fails over",
			seconds(d.TTL), seconds(d.TTL)*2/3)
	}
	for _, f := range d.Findings {
		text := f.Text
		if f.Remedy != "" {
			text += ": " + f.Remedy
		}
		table.line(f.Level, "%s (%s)", text, f.Check)
	}
	result, _ := d.result()
	table.line("result", "%s", result)
	return table.Flush()
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// examine finds out all that doctor prints. Its error is one of the command line.
func (s *storeFlag) examine(ctx context.Context, replicas int, look time.Duration) (*diagnosis, error) {
	name, err := s.name()
	if err != nil {
		return nil, err
	}
	d := &diagnosis{Findings: []finding{}}
	usable := true
	switch scheme := schemeOf(name); {
	case scheme == nil:
		usable = d.lookAtFile(name, s)
	case isPostgres(name):
		usable = d.lookAtPostgres(ctx, name, replicas)
	case scheme.names[0] == "nats": // whose settings a client can't ask for
		d.Server = "NATS JetStream"
		if !strings.Contains(name, "sync=always") {
			d.add("sync", warning("unless the servers run with sync_interval: always, a lease may be held twice after a power failure", "if they do, add sync=always to the URL"))
		}
	default:
		d.Server = map[string]string{"etcd": "etcd", "kube": "Kubernetes", "mysql": "MySQL or MariaDB"}[scheme.names[0]]
	}
	if usable {
		if err := d.use(ctx, s, look); errors.As(err, new(errUsage)) {
			return nil, err
		} else if err != nil {
			d.add("store", explained(err))
		}
	}
	d.Fit = !d.has(levelFault)
	return d, nil
}

// explained returns the fault of a store that could not be used.
func explained(err error) finding {
	f := fault(packageName.ReplaceAllString(oneLine(err), ""), "")
	if missing := (*objects.NoTable)(nil); errors.As(err, &missing) {
		f = fault(oneLine(missing.Cause), "run tenure migrate, then doctor again")
	}
	return f
}

// use opens the store, and holds a lease in it for some time. What the store logs is a finding, too.
func (d *diagnosis) use(ctx context.Context, s *storeFlag, look time.Duration) error {
	log := &findings{}
	opening, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	store, err := s.open(opening, slog.New(log))
	if err != nil {
		return err
	}
	defer func() {
		store.Close()
		for _, f := range log.all() {
			d.add("log", f)
		}
	}()
	d.Server = cmp.Or(d.Server, s.describe(store))
	if store, ok := store.(*mysqltenure.Store); ok {
		d.Server = productOf(opening, store.DB())
		if err := store.Check(opening); err != nil {
			return err
		}
	}
	key := tenure.Key{Type: "tenure.doctor", ID: rand.Text()}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Logger: slog.New(log)})
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	term, err := lease.AcquireOrSteal(limited)
	if err != nil {
		return err
	}
	defer func() {
		leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := lease.Release(leaving, term); err != nil {
			d.add("store", explained(err))
		}
	}()
	watch := store.Watch(key)
	defer watch.Stop()
	if err := d.measure(ctx, store, lease, term, look); err != nil {
		return err
	}
	return d.wakeUps(ctx, store, lease, term, watch, log)
}

// findings collects what a store warns about.
type findings struct {
	mu     sync.Mutex
	warned []finding
}

func (f *findings) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }
func (f *findings) WithAttrs([]slog.Attr) slog.Handler               { return f }
func (f *findings) WithGroup(string) slog.Handler                    { return f }

func (f *findings) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if value := a.Value.String(); value != "" {
			text += fmt.Sprintf(", %s %s", a.Key, value)
		}
		return true
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.ContainsFunc(f.warned, func(w finding) bool { return w.Text == text }) {
		f.warned = append(f.warned, warning(text, ""))
	}
	return nil
}

func (f *findings) all() []finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.warned)
}

// said reports whether a warning contains a text.
func (f *findings) said(text string) bool {
	return slices.ContainsFunc(f.all(), func(w finding) bool { return strings.Contains(w.Text, text) })
}
