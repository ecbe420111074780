package mysqltenure

import (
	"cmp"
	"context"
	"crypto/tls"
	"database/sql"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// New returns a store in the caller's database, which remains the caller's. It asks the server once what it is; one
// that is unsuitable is [tenure.ErrSetup]. Call [Store.Migrate] before the first use.
//
// Renewals wait for a connection like all other queries, and each store keeps one for each of up to four watched leases, unless the pool
// may have fewer than ten. With the driver's interpolateParams a call takes one round trip in place of two. The driver's
// rejectReadOnly keeps the store off a server that was demoted. No code may leave a transaction open on a connection that it
// gives back to the pool, or autocommit off: the store's next write would be part of it.
func New(ctx context.Context, db *sql.DB, cfg Config) (*Store, error) {
	cfg, err := cfg.withDefaults()
	if db == nil {
		err = fmt.Errorf("%w: db is nil", tenure.ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("mysqltenure: new store: %w", err)
	}
	store, err := newOn(ctx, pools{calls: db, bells: db, app: db}, cfg)
	if err != nil {
		return nil, fmt.Errorf("mysqltenure: new store: %w", err)
	}
	return store, nil
}

// newOn returns a store on pools, once the server has said what it is.
func newOn(ctx context.Context, p pools, cfg Config) (*Store, error) {
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	is, err := lookAt(ctx, p.calls)
	if err != nil {
		return nil, explained(err)
	}
	if is.database == "" && !strings.Contains(cfg.Table, ".") {
		return nil, fmt.Errorf("%w: the connections use no database, and Table names none", tenure.ErrSetup)
	}
	if err := is.fit(); err != nil {
		return nil, err
	}
	return newStore(p, cfg, is), nil
}

// Open returns a store on connections of its own, which [Store.Close] closes: up to four for calls, one for each
// watched lease, up to four, and those of [Store.DB]. The name is a DSN of the driver, user:password@tcp(host:3306)/database, or a URL,
// mysql://user:password@host:3306/database, in which special characters are written as %XX. Parameters of the URL are
// tls=true, and ca, cert and key, which name PEM files, see [storekit.URL.TLS]. Open asks the server once what it is; one that
// is unsuitable is [tenure.ErrSetup]. Call [Store.Migrate] before the first use.
func Open(ctx context.Context, dsn string, cfg Config) (*Store, error) {
	store, err := open(ctx, dsn, cfg)
	if err != nil {
		return nil, fmt.Errorf("mysqltenure: open: %w", err)
	}
	return store, nil
}

func open(ctx context.Context, dsn string, cfg Config) (*Store, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	config, err := parse(dsn)
	if err != nil {
		return nil, err
	}
	first, err := openPools(config, server{})
	if err != nil {
		return nil, err
	}
	store, err := newOn(ctx, first, cfg)
	if err != nil {
		first.close()
		return nil, err
	}
	defer store.Close()
	// Once more, because which variables a session has depends on the server.
	p, err := openPools(config, store.server)
	if err != nil {
		return nil, err
	}
	return newStore(p, cfg, store.server), nil
}

const dialTimeout = 5 * time.Second

// parse returns the driver's config for a DSN or a URL. Its errors quote neither.
func parse(dsn string) (*mysql.Config, error) {
	config, err := parseURL(dsn)
	if !strings.HasPrefix(dsn, "mysql://") {
		if config, err = mysql.ParseDSN(dsn); err != nil {
			err = fmt.Errorf("%w: it is neither a DSN, user:password@tcp(host:3306)/database, nor a mysql:// URL", tenure.ErrInvalid)
		}
	}
	if err != nil {
		return nil, err
	}
	config.Logger = &mysql.NopLogger{}                                 // what goes wrong is in the errors
	config.InterpolateParams = true                                    // one round trip
	config.RejectReadOnly = true                                       // a connection to a server that was demoted is given up
	if err := config.Apply(mysql.Charset("utf8mb4", "")); err != nil { // with others, interpolated parameters are not safe
		return nil, err
	}
	config.Timeout = cmp.Or(config.Timeout, dialTimeout)
	return config, nil
}

func parseURL(text string) (*mysql.Config, error) {
	u, err := storekit.ParseURL(text, []string{"mysql"}, []string{"tls", "ca", "cert", "key"})
	if err != nil {
		return nil, err
	}
	config := mysql.NewConfig()
	config.Net, config.Addr, config.DBName = "tcp", u.Hosts[0], u.Path
	switch value, ok := u.Parameters["tls"]; {
	case len(u.Hosts) > 1:
		return nil, fmt.Errorf("%w: the URL has several hosts: name the one that leads to the server that accepts writes", tenure.ErrInvalid)
	case u.Path == "" || strings.Contains(u.Path, "/"):
		return nil, fmt.Errorf("%w: the URL has no database: write mysql://user:password@host:3306/database", tenure.ErrInvalid)
	case ok && value != "true":
		return nil, fmt.Errorf("%w: tls of the URL must be true, or left out", tenure.ErrInvalid)
	case ok:
		config.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if secure, err := u.TLS(); err != nil {
		return nil, err
	} else if secure != nil {
		config.TLS = secure
	}
	if _, _, err := net.SplitHostPort(config.Addr); err != nil {
		config.Addr = net.JoinHostPort(strings.Trim(config.Addr, "[]"), "3306")
	}
	if u.User != nil {
		config.User = u.User.Username()
		config.Passwd, _ = u.User.Password()
	}
	return config, nil
}
