from smoe_cli.main import main

main()
