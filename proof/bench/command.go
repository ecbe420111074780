package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// command is what the flags ask for.
type command struct {
	measures    []measure
	peers       []peer
	json        bool
	svg, curves string
	n           int
	quick       bool
	duration    time.Duration
	postgresURL string
}

func parse(args []string) (c command, err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	measureList := flags.String("measure", "", "")
	peerList := flags.String("peer", "", "")
	flags.BoolVar(&c.json, "json", false, "")
	flags.StringVar(&c.svg, "svg", "", "")
	flags.StringVar(&c.curves, "curves", "", "")
	flags.IntVar(&c.n, "n", 0, "")
	flags.BoolVar(&c.quick, "quick", false, "")
	flags.DurationVar(&c.duration, "duration", 5*time.Minute, "")
	flags.StringVar(&c.postgresURL, "postgres-url", "", "")
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	if flags.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if c.n < 0 {
		return c, fmt.Errorf("-n %d is negative", c.n)
	}
	if c.duration <= 0 {
		return c, fmt.Errorf("-duration %v is not positive", c.duration)
	}
	c.measures, c.peers = usual(), peers
	if *measureList != "" {
		c.measures, err = named("measure", *measureList, measures, func(m measure) string { return m.name })
	}
	if err == nil && *peerList != "" {
		c.peers, err = named("peer", *peerList, peers, func(p peer) string { return p.name })
	}
	return c, err
}

// named returns the elements that a comma-separated list names, in their own order.
func named[T any](what, list string, all []T, nameOf func(T) string) (found []T, err error) {
	names := strings.Split(list, ",")
	for _, name := range names {
		if !slices.ContainsFunc(all, func(one T) bool { return nameOf(one) == name }) {
			return nil, fmt.Errorf("no %s %q", what, name)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return !slices.Contains(names, nameOf(one)) }), nil
}

func usage(w io.Writer) {
	fmt.Fprint(w, `Usage: go run . [flags]

Measures this library beside others that keep leases: on one machine, in one
run, against a PostgreSQL, an etcd, a NATS and a MariaDB server that it starts itself on the
loopback interface and that write to disk. Prints a table per measure.

  -measure LIST      only these measures, separated by commas
  -peer LIST         only these peers, separated by commas
  -n N               this many samples for each figure; fewer for peers that poll
  -quick             few samples: shows that everything works, not how well
  -duration D        of rows-sustained, by default 5m; the more of it, the more renewals in short-ttl
  -json              print one JSON document instead of the tables
  -svg FILE          also draw handover and failover
  -curves FILE       also draw scale and short-ttl
  -postgres-url URL  use this server; its user must be able to create databases

Measures:
`)
	for _, m := range measures {
		fmt.Fprintf(w, "  %-17s  %s\n", m.name, m.about)
	}
	fmt.Fprint(w, "\nPeers:\n")
	for _, p := range peers {
		fmt.Fprintf(w, "  %-17s  %s\n", p.name, p.about)
	}
}

func (c command) bench(ctx context.Context, stdout, stderr io.Writer) (err error) {
	defer rig.RemoveMariaDB()
	pg, err := startPostgres(ctx, c.postgresURL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.close()) }()
	etcd, nats, mysql := newEtcd(), newNATS(), newMariaDB()
	defer func() { err = errors.Join(err, etcd.close(), nats.close(), mysql.close()) }()
	if _, err := os.Stat(rig.MariaDBProgram); err != nil {
		fmt.Fprintln(stderr, "There is no MariaDB: its peers are left out.")
		c.peers = slices.DeleteFunc(slices.Clone(c.peers), func(p peer) bool { return p.on == onMySQL })
	}
	files, err := os.MkdirTemp("", "tenure-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(files)
	b := &bench{
		peers:    c.peers,
		n:        c.n,
		quick:    c.quick,
		duration: c.duration,
		postgres: pg,
		etcd:     etcd,
		nats:     nats,
		mysql:    mysql,
		files:    files,
		trials:   make(chan struct{}, 10),
		report:   &report{},
		progress: stderr,
	}
	f, err := machineFacts(ctx, pg)
	if err != nil {
		return err
	}
	if !c.json {
		fmt.Fprintln(stdout, f)
	}

	var errs []error
	done := func(m measure, began time.Time, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", m.name, err))
		}
		b.say("%s took %v", m.name, time.Since(began).Round(time.Second))
		records, notes := b.report.of(m.name)
		if !c.json && len(records)+len(notes) > 0 {
			fmt.Fprintf(stdout, "\n## %s: %s\n\n", m.name, m.about)
			errs = append(errs, writeTable(stdout, records, notes))
		}
	}
	var waiting []measure
	for _, m := range c.measures {
		if m.waits {
			waiting = append(waiting, m)
			continue
		}
		began := time.Now()
		done(m, began, m.run(ctx, b))
		if interrupted(ctx) {
			return errors.Join(errs...)
		}
	}
	var wg sync.WaitGroup
	ends := make([]error, len(waiting))
	began := time.Now()
	for i, m := range waiting {
		wg.Go(func() { ends[i] = m.run(ctx, b) })
	}
	wg.Wait()
	for i, m := range waiting {
		done(m, began, ends[i])
	}

	if c.svg != "" {
		errs = append(errs, os.WriteFile(c.svg, drawPlot(b.report.records, f), 0o644))
	}
	if c.curves != "" {
		errs = append(errs, os.WriteFile(c.curves, drawCurves(b.report.records, f), 0o644))
	}
	if c.json {
		errs = append(errs, b.report.writeJSON(stdout, f))
	}
	return errors.Join(errs...)
}
