package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tenurelib/tenure/internal/proctree"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// failoverTTL is so long that a job can go on over a failover, for which there is a third of it.
const failoverTTL = 6 * time.Second

// failovers is a primary, which is lost again and again, and its standbys. Replicas reach it directly, through PgBouncer, or
// on whatever server answers first, by connections that may be older than its promotion.
type failovers struct {
	*postgres                           // the primary
	servers   []*testkit.PostgresServer // with the primary; each keeps its address
	down      *testkit.PostgresServer   // the one that does not run, or nil
	bouncers  []*testkit.Bouncer
	proxies   []*rig.Proxy
	routes    []*rig.Proxy // those of the proxies that lead to the primary
	lost      []span
}

func newFailovers(ctx context.Context) (_ *failovers, err error) {
	first, err := newPostgres(ctx, movesClock, "wal_log_hints=on")
	if err != nil {
		return nil, err
	}
	db := &failovers{postgres: first, servers: []*testkit.PostgresServer{first.server}}
	// pg_rewind lets a server that has crashed recover, without what its command line says, and then needs all of its WAL.
	for _, setting := range []string{"wal_log_hints = on", "wal_keep_size = '512MB'"} {
		if err := db.exec(ctx, `ALTER SYSTEM SET `+setting); err != nil {
			return nil, errors.Join(err, db.close())
		}
	}
	for range 2 {
		standby, err := first.server.Standby()
		if err != nil {
			return nil, errors.Join(err, db.close())
		}
		db.servers = append(db.servers, standby)
	}
	return db, nil
}

func (db *failovers) close() (err error) {
	db.closeBouncers()
	for _, p := range db.proxies {
		p.Close()
	}
	for _, s := range db.servers {
		err = errors.Join(err, s.Close())
	}
	return err
}

func (db *failovers) closeBouncers() {
	for _, b := range db.bouncers {
		_ = b.Close() // its connections would seem to be a replica's
	}
	db.bouncers = nil
}

func (db *failovers) audit(ctx context.Context) (*audit, error) {
	db.closeBouncers()
	a, err := db.postgres.audit(ctx)
	if err == nil {
		a.lost, a.groups, a.versions = db.lost, false, false
	}
	return a, err
}

// proxy returns the address of a new proxy to a server.
func (db *failovers) proxy(to *testkit.PostgresServer, route bool) (addr string, err error) {
	proxy, err := rig.NewProxy(hostOf(to), nil)
	if err != nil {
		return "", err
	}
	db.proxies = append(db.proxies, proxy)
	if route {
		db.routes = append(db.routes, proxy)
	}
	return proxy.Addr(), nil
}

func hostOf(server *testkit.PostgresServer) string { return testkit.Must(url.Parse(server.URL())).Host }

func (db *failovers) replica(i int, cfg replicaConfig) (replicaConfig, *rig.Proxy, error) {
	u := *db.app
	q := u.Query()
	q.Set("connect_timeout", "2")
	var err error
	if i%3 == 2 {
		var hosts []string
		for n := range db.servers { // each replica begins with another
			host, err := db.proxy(db.servers[(i+n)%len(db.servers)], false)
			if err != nil {
				return cfg, nil, err
			}
			hosts = append(hosts, host)
		}
		u.Host = strings.Join(hosts, ",")
		q.Set("target_session_attrs", "any")
	} else if u.Host, err = db.proxy(db.server, true); err != nil {
		return cfg, nil, err
	}
	if i%3 == 1 {
		bouncer, err := testkit.NewBouncer(u.String())
		switch {
		case err == nil:
			db.bouncers = append(db.bouncers, bouncer)
			u = *testkit.Must(url.Parse(bouncer.URL))
			q.Set("default_query_exec_mode", "exec")
		case !errors.Is(err, testkit.ErrNoBouncer):
			return cfg, nil, err
		}
	}
	q.Set("application_name", cfg.Name)
	u.RawQuery = q.Encode()
	cfg.URL, cfg.SharePool, cfg.Pace = u.String(), i%2 == 0, 60*time.Millisecond
	return cfg, nil, nil
}

func (db *failovers) kinds() []faultKind {
	return []faultKind{
		{name: "failover (immediate)", group: "server", weight: 6, begin: db.failOver((*failovers).crash)},
		{name: "failover (SIGSTOP)", group: "server", weight: 4, begin: db.failOver((*failovers).freeze)},
		{name: "switchover", group: "server", weight: 2, begin: db.switchOver},
		{name: stoppedImmediate, group: "server", weight: 2, begin: db.stop("immediate")},
		{name: "standby stopped (immediate)", group: "server", weight: 1, begin: db.stopStandby},
	}
}

// standbys returns the standbys that run, in random order.
func (db *failovers) standbys(p *phase) []*testkit.PostgresServer {
	all := slices.DeleteFunc(slices.Clone(db.servers), func(s *testkit.PostgresServer) bool { return s == db.server || s == db.down })
	p.rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// failOver cuts all standbys off: what is written from then on will be lost. At its end the primary ends in one way or
// another, and a standby is promoted. Replicas come to it one after the other, and one of them later.
func (db *failovers) failOver(end func(*failovers) (gone func() error, err error)) func(context.Context, *phase) (string, ending, error) {
	return func(ctx context.Context, p *phase) (string, ending, error) {
		standbys := db.standbys(p)
		lost := span{from: monotonic()}
		for _, s := range standbys {
			if err := s.CatchUp(ctx, db.server); err != nil {
				return "", nil, err
			}
		}
		for _, s := range standbys {
			if err := s.CutOff(ctx); err != nil {
				return "", nil, err
			}
		}
		return fmt.Sprintf("all, to one of %d", len(standbys)), func() (time.Duration, error) {
			gone, err := end(db)
			if err != nil {
				return 0, err
			}
			lost.to = monotonic()
			db.lost = append(db.lost, lost)
			return db.promote(ctx, p, standbys[0], gone)
		}, nil
	}
}

// switchOver loses nothing.
func (db *failovers) switchOver(ctx context.Context, p *phase) (string, ending, error) {
	standbys := db.standbys(p)
	return "all", func() (time.Duration, error) {
		// A server that shuts down waits for its standbys to have everything.
		if err := db.server.Stop("fast"); err != nil {
			return 0, err
		}
		return db.promote(ctx, p, standbys[0], func() error { return nil })
	}, nil
}

func (db *failovers) stopStandby(_ context.Context, p *phase) (string, ending, error) {
	s := db.standbys(p)[0]
	return "nobody", func() (time.Duration, error) { return 0, s.Start() }, s.Stop("immediate")
}

// promote makes a standby the primary, leads the replicas there, and lets the other servers follow it. Gone ends what is left of the
// former primary. It returns when the first replicas could reach the new one.
func (db *failovers) promote(ctx context.Context, p *phase, to *testkit.PostgresServer, gone func() error) (time.Duration, error) {
	former := db.server
	if err := to.Promote(); err != nil {
		return 0, err
	}
	db.moveTo(to)
	routes := slices.Clone(db.routes)
	p.rand.Shuffle(len(routes), func(i, j int) { routes[i], routes[j] = routes[j], routes[i] })
	late := routes[0]
	late.Set(rig.Weather{Refuse: true})
	for _, route := range routes[1:] {
		route.Redirect(hostOf(to))
		pause(ctx, p.upTo(100*time.Millisecond))
	}
	at := monotonic()
	if err := gone(); err != nil { // only now, so that connections to it hang
		return 0, err
	}
	pause(ctx, p.upTo(p.ttl/2))
	late.Redirect(hostOf(to))
	late.Set(rig.Weather{})

	// Sometimes the former primary stays away until the next one is lost, too.
	stays := db.down == nil && p.rand.IntN(3) == 0
	for _, s := range db.servers {
		switch {
		case s == to:
			continue
		case s != former && s != db.down:
			if err := s.Stop("fast"); err != nil {
				return 0, err
			}
		case s == former && stays:
			continue
		}
		for _, do := range []func() error{func() error { return s.Rewind(to) }, func() error { return s.Follow(to) }, s.Start} {
			if err := do(); err != nil {
				return 0, err
			}
		}
	}
	if db.down = nil; stays {
		db.down = former
	}
	return at, nil
}

func (db *failovers) crash() (gone func() error, err error) {
	return func() error { return nil }, db.server.Stop("immediate")
}

// freeze stops all processes of the primary, so that connections to it hang, and kills them later: it must not write again.
func (db *failovers) freeze() (gone func() error, err error) {
	server := db.server
	first, err := server.PID()
	if err != nil {
		return nil, err
	}
	if err := syscall.Kill(first, syscall.SIGSTOP); err != nil { // it starts no others from now on
		return nil, err
	}
	children := proctree.Descendants(first)
	signal := func(s syscall.Signal) {
		for _, p := range children {
			_ = syscall.Kill(p.PID, s) // one that has ended is as good
		}
	}
	signal(syscall.SIGSTOP)
	return func() error {
		signal(syscall.SIGKILL)
		return server.Stop("kill")
	}, nil
}
