package integrations

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"gorm.io/driver/mysql"
	"gorm.io/driver/postgres"
	"gorm.io/driver/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/tenurelib/tenure"
)

// deployment is a GORM model.
type deployment struct {
	ID    int
	Phase string
}

// fencedTransaction is GORM's Transaction, which commits only if the term is still the
// lease's. Otherwise it returns tenure.ErrLost.
func fencedTransaction(ctx context.Context, store tenure.SQLStore, db *gorm.DB, fn func(tx *gorm.DB) error) error {
	return tenure.FenceError(db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		fence, args, err := store.FenceStatement(tenure.TermFromContext(ctx))
		if err != nil {
			return err
		}
		if err := fn(tx); err != nil {
			return err
		}
		return tx.Exec(fence, args...).Error // the last statement before the commit
	}))
}

func promote(ctx context.Context, store tenure.SQLStore, db *gorm.DB) error {
	return fencedTransaction(ctx, store, db, func(tx *gorm.DB) error {
		return tx.Create(&deployment{Phase: "promoted"}).Error
	})
}

func TestOnlyTheHolderCommitsTransactionsOfGORM(t *testing.T) {
	dialects := map[string]func(*sql.DB) gorm.Dialector{
		"pgx":    func(db *sql.DB) gorm.Dialector { return postgres.New(postgres.Config{Conn: db}) },
		"sqlite": func(db *sql.DB) gorm.Dialector { return sqlite.Dialector{Conn: db} },
		"mysql":  func(db *sql.DB) gorm.Dialector { return mysql.New(mysql.Config{Conn: db}) },
	}
	for driver, open := range sqlStores {
		t.Run(driver, func(t *testing.T) {
			ctx := limited(t)
			store, dsn := open(t)
			sqlDB, err := sql.Open(driver, dsn)
			must(t, err)
			defer sqlDB.Close()
			db, err := gorm.Open(dialects[driver](sqlDB), &gorm.Config{Logger: logger.Discard})
			must(t, err)
			must(t, db.AutoMigrate(&deployment{}))

			run, stop := context.WithCancel(ctx)
			var former context.Context // of a term that is over
			coordinator := newCoordinator(store, "gorm", func(ctx context.Context) error {
				defer stop()
				former = ctx
				return promote(ctx, store, db)
			})
			must(t, coordinator.Run(run))

			// The term's end is known here, so nothing is sent. A statement that was made before
			// it was known is refused by the database.
			if err := promote(context.WithoutCancel(former), store, db); !errors.Is(err, tenure.ErrLost) {
				t.Errorf("a former holder: got error %v, want %v", err, tenure.ErrLost)
			}
			term := takenOver(t, store, "gorm")
			err = tenure.FenceError(db.Transaction(func(tx *gorm.DB) error {
				fence, args, err := store.FenceStatement(term)
				must(t, err)
				must(t, tx.Create(&deployment{Phase: "late"}).Error)
				return tx.Exec(fence, args...).Error
			}))
			if !errors.Is(err, tenure.ErrLost) {
				t.Errorf("a holder that does not know yet: got error %v, want %v", err, tenure.ErrLost)
			}
			var phases []string
			must(t, db.Model(&deployment{}).Pluck("phase", &phases).Error)
			if len(phases) != 1 || phases[0] != "promoted" {
				t.Errorf("got deployments %v, want one that is promoted", phases)
			}
		})
	}
}
